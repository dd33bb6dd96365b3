"""What is learned from: images, texts and synthetic data, found or fetched or made, and how they are split."""
