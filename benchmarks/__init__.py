"""What raypfl costs, measured beside what one would write without it."""
