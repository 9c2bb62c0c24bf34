"""Files of a run: complete or not there. Saving, reading back, resharding and exporting."""
