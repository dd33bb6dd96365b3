"""What notebooks compute besides the tables, one module per question."""
