"""Several processes that train one model together, and how they make sure that they do."""
