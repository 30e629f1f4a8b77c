"""Campaigns over many faults: generated registrations, mutants of torch, margins."""
