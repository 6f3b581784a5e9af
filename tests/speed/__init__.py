"""Tests of bottleneck(), generation(), the watch of steps, and of scripts."""
