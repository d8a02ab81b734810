"""Tests of claims meeting reality: parity of layouts, and what planted faults are called."""
