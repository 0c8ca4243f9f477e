"""What a worker needs, found before it reads weights."""
