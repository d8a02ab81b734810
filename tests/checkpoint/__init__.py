"""State on disk: any layout into any other, and what can go wrong on the way."""
