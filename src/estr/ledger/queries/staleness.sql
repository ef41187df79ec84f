-- Staleness of the trained trajectories in the course of the run, in 20 stretches of steps.
select
    min(step) as from_step,
    max(step) as to_step,
    avg(intra) as intra_mean,
    max(intra) as intra_max,
    avg(inter) as inter_mean,
    max(inter) as inter_max,
    max(staleness) as staleness_max,
    avg((intra > 0)::int) as share_across_updates
from (select *, ntile(20) over (order by step) as part from trajectory_facts)
where advantage is not null
group by part
order by part
