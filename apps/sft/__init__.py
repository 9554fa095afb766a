"""Supervised fine-tuning, and what the apps that train on rows that are there have in common."""
