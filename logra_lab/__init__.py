"""LoGRA: post-train language models from random gradient sketches (arXiv:2610.06647)."""
