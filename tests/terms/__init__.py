"""Tests of the room terms/."""
