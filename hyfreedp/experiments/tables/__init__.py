"""Which runs fill the tables of accuracies, what they are compared with, and the tables themselves."""
