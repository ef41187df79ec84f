"""Our losses inside other packages' trainers. Each module imports its package only when it is used;
none of them is a dependency of estr. How to hook others by hand: docs/hooks.md."""
