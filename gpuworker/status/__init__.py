"""What the workers are doing, where everybody can see it."""
