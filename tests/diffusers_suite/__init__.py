"""Runs diffusers' own tests of UNets, VAEs, ControlNets and their pipelines on accelerated models."""
