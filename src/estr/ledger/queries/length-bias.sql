-- Does the length of a trajectory decide how old, how masked and how well rewarded it is?
-- In ten parts of equal number, shortest first.
select
    part,
    count(*) as trajectories,
    min(num_sampled_tokens) as shortest,
    max(num_sampled_tokens) as longest,
    avg(intra) as intra,
    avg(inter) as inter,
    avg(rho_mask) as rho_mask,
    avg(reward) as reward,
    avg(advantage) as advantage
from (select *, ntile(10) over (order by num_sampled_tokens) as part from trajectory_facts)
group by part
order by part
