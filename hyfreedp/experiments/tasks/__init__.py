"""Tasks by name: data, models, training protocol and scores."""
