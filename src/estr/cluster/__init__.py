"""Ray placement (`placement = "ray"`): trainer, engines and evaluator as actors of a Ray cluster.

    session       joins a cluster or starts a local Ray, and leaves it
    ray_worker    a host of estr.worker inside an actor, spoken to as if it were a process
    ray_child     the host in a child process of its actor, which has another interpreter
    flat          weights as one flat buffer and its manifest
    ray_weights   the WeightStore over Ray's object store
    placement     where each actor goes; all of them together, as the run sees them

Loop, trainer and engines are the same as without Ray: only how frames and weights travel is written
here. Scheduling, RPC and transport are Ray's, which is imported inside functions only.
"""
