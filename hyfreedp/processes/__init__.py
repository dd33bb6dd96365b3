"""Several processes that train one model together, and the checks that they do."""
