"""Several processes that train one model together, and checks that they really do."""
