"""Tests of the room verification/."""
