"""Predicts memory and time of DeepSpeed configurations, and chooses one."""
