"""Inputs that no program expects, drawn from numbers: each ends as one short error of ours, or as what is right."""
