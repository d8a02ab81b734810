"""Tests of plan: formulas against the literature, against brute force, and against published runs."""
