"""Many nodes: launching ranks and examining machines before a run."""
