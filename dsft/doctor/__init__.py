"""`dsft doctor`: examines machines before a run starts on them. Facts of each node -> checks -> findings -> screen."""
