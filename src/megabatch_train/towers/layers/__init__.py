"""Layers that replace layers of an encoder: faster attention and patch embeddings, packed texts, and LoRA adapters."""
