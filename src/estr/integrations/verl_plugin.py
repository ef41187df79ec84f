"""Imported by verl itself: VERL_USE_EXTERNAL_MODULES=estr.integrations.verl_plugin."""

from .verl import install

install()
