"""Line searches that were once the default, for tables and ablations: contrasts of losses, rules that remember."""
