"""Typed options, torch-free: what a recipe may say. `estr.config` reads them."""
