"""Tests of whole jobs, which span rooms."""
