-- Is the record worse behind a switch of the weights? Trajectories that span one, by how many
-- tokens lie between a token and the last change of version before it. At most 5,000 of them,
-- drawn at random.
with switched as (
    select
        *,
        lag(versions) over (partition by step, trajectory order by position) as version_before
    from trained_tokens
    join (
        -- A sample is drawn of what stands behind `from`, before any `where`.
        select * from (select step, trajectory from trajectory_facts where intra > 0)
        using sample 5000 rows (reservoir, 0)
    ) using (step, trajectory)
),
placed as (
    select
        *,
        max(case when versions <> version_before then position end)
            over (partition by step, trajectory order by position) as switched_at
    from switched
)
select
    case
        when switched_at is null then 'before any'
        when position - switched_at = 0 then 'the first'
        when position - switched_at < 8 then '1 to 7 later'
        else '8 and more later'
    end as tokens_after_switch,
    count(*) as tokens,
    avg(log_ratio * log_ratio) as second_moment,
    avg((not kept)::int) as rho_mask,
    avg(behavior_entropies) as entropy
from placed
group by 1
order by min(coalesce(position - switched_at, -1))
