"""What a run ended with, as networks; models for new clients, from files and over HTTP."""
