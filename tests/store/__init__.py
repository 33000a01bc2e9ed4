"""Tests of the room store/."""
