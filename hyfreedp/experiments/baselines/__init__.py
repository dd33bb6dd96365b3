"""What the tables compare with and the core does not hold: adaptive clipping."""
