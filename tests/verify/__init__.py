"""Tests of the room where claims meet reality."""
