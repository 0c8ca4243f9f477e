"""The commands for engines of other machines."""
