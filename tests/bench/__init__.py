"""Measurements, on real processes: not tests of whether something holds, but of how long it takes."""
