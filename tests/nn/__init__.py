"""Tests of the network on one device: against torch's own functions and against Hugging Face's Llama."""
