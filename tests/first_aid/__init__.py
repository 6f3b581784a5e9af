"""First aid: procedures, describe, smallest."""
