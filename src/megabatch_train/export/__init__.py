"""Trained models for other programs, with a model card."""
