"""What a user can ask for: option dataclasses, their checks, and how files and flags are read. Loads no model."""
