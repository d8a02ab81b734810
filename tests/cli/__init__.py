"""Tests of what a user types."""
