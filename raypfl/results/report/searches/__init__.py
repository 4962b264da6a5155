"""What searches tried, found and chose: their folders, and their sections of the page."""
