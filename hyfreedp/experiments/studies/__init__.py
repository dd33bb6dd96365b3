"""What notebooks compute and draw beside the tables: one module per question."""
