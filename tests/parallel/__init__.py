"""Tests of the layout made real: each layout against one device."""
