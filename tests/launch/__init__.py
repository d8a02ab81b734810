"""Tests of the room that starts ranks and watches them."""
