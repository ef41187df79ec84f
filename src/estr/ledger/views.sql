-- Everything that follows from the facts. `tokens`, `trajectories` (the parts as they are) and
-- `settings` (one row for each step: what its corrections say of themselves) exist already.

-- Whatever a token needs from its trajectory and its step is joined to the trajectories first: they
-- are few, and the many tokens are then joined once.

-- The tokens that were trained on: sampled by the model, in a trajectory with an advantage.
create view trained_tokens as
with joined as (
    select
        step, trajectory, segment, position, token_ids, versions,
        group_id, advantage, target_version,
        target_version - versions as lag,
        behavior_logprobs, behavior_entropies, behavior_gini,
        policy_logprobs, proximal_logprobs, ref_logprobs,
        kept, clipped,
        policy_logprobs - behavior_logprobs as log_ratio,
        not_negative(behavior_entropies) as entropy,
        eps, weight_edge
    from tokens
    join (
        select step, trajectory, group_id, advantage, trajectories.target_version, eps, weight_edge
        from trajectories join settings using (step)
    ) using (step, trajectory)
    where kept is not null
)
select
    joined.* exclude (entropy, eps, weight_edge),
    entropy_bin(entropy) as entropy_bin,
    bounded_ratio(log_ratio) as ratio,
    log_ratio * log_ratio / (entropy + eps) as score,
    case weight_edge
        when 'none' then 1.0
        when 'B' then bounded_ratio(coalesce(proximal_logprobs, policy_logprobs) - behavior_logprobs)
    end::float as weight
from joined;

-- What each of them adds to the loss of its step, and the factor of its log-prob's gradient in it.
-- NULL at every token of a step whose correction cannot be followed in SQL (`estr replay` can): a
-- 0 at the rejected ones would make a sum of what is known of nothing.
create view loss_terms as
with of_trajectories as (
    select step, trajectory, count(kept) as num_trained_tokens
    from tokens
    group by step, trajectory
),
counted as (
    select step, group_id, sum(num_trained_tokens) as tokens_of_group
    from of_trajectories join trajectories using (step, trajectory)
    where num_trained_tokens > 0
    group by step, group_id
),
denominators as (
    select
        step, group_id,
        surrogate_edge, clip_low, clip_high,
        weight_edge is not null and surrogate_edge is not null as is_followed,
        (case aggregation
            when 'batch' then sum(tokens_of_group) over (partition by step)
            else tokens_of_group * count(*) over (partition by step)
        end)::double as denominator  -- a sum of counts has 128 bits, which is slow for every token
    from counted join settings using (step)
),
terms as (
    select
        trained_tokens.*, denominator, is_followed, clip_low, clip_high,
        case surrogate_edge
            when 'E' then log_ratio
            when 'U' then policy_logprobs - coalesce(proximal_logprobs, policy_logprobs)
        end as surrogate_log_ratio,
        bounded_ratio(surrogate_log_ratio) as surrogate_ratio
    from trained_tokens
    join denominators using (step, group_id)
)
select
    * exclude (
        is_followed, clip_low, clip_high, surrogate_log_ratio, surrogate_ratio, denominator
    ),
    case when not is_followed then null when kept then
        -weight * least(
            surrogate_ratio * advantage,
            greatest(least(surrogate_ratio, 1 + clip_high), 1 - clip_low) * advantage
        ) / denominator
    else 0 end as loss_term,
    case when not is_followed then null
        when kept and not clipped and is_in_bounds(surrogate_log_ratio)
        then -weight * surrogate_ratio * advantage / denominator
    else 0 end as gradient_coefficient
from terms;

-- Trajectories with what their tokens say: length, staleness, what was kept. One that failed before
-- its first token has none, and is a row nonetheless.
create view trajectory_facts as
with counted as (
    select
        step, trajectory,
        count(*) as num_tokens,
        count(*) filter (where sampled) as num_sampled_tokens,
        count(kept) as num_trained_tokens,
        count(*) filter (where kept) as num_kept_tokens,
        min(versions) as first_version,
        max(versions) as last_version,
        avg(behavior_entropies) as mean_entropy
    from tokens
    group by step, trajectory
)
select
    trajectories.*,
    counted.* exclude (step, trajectory) replace (
        coalesce(num_tokens, 0) as num_tokens,
        coalesce(num_sampled_tokens, 0) as num_sampled_tokens,
        coalesce(num_trained_tokens, 0) as num_trained_tokens,
        coalesce(num_kept_tokens, 0) as num_kept_tokens
    ),
    last_version - first_version as intra,
    target_version - last_version as inter,
    target_version - first_version as staleness,
    1 - num_kept_tokens / nullif(num_trained_tokens, 0) as rho_mask
from trajectories left join counted using (step, trajectory);
