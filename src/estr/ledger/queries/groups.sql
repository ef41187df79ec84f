-- Groups that taught nothing (equal outcomes), and groups consumed more than once (there ought to be
-- none), in 20 stretches of steps.
with per_group as (
    select
        step, group_id,
        count(*) as members,
        count(advantage) as scored,
        coalesce(max(outcome) = min(outcome), true) as equal_outcomes,
        avg(outcome) as outcome
    from trajectories
    group by step, group_id
),
counted as (
    select *, count(*) over (partition by group_id) as times, ntile(20) over (order by step) as part
    from per_group
)
select
    min(step) as from_step,
    max(step) as to_step,
    count(*) as groups,
    avg(outcome) as outcome,
    avg(equal_outcomes::int) as share_equal,
    sum(members - scored) as unscored_members,
    count(*) filter (where times > 1) as consumed_again
from counted
group by part
order by part
