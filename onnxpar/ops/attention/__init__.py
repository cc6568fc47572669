"""Attention by batch, heads and sequence; rotary embeddings, packed heads, decoding caches."""
