"""Data sets: images, texts and synthetic data, where they come from, and how they are split."""
