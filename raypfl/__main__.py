"""`python -m raypfl`, where the command is not on the path."""

from raypfl.cli.process import command

command()
