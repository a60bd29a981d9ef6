package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/config/confighttp"
	"go.opentelemetry.io/collector/config/configoptional"
	"go.opentelemetry.io/collector/config/configretry"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/exporterhelper"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/processorhelper"
)

// Stand-ins for three components of the contrib distribution, which Debian does not have. They know the keys and the types that the originals
// document (their config.schema.yaml of 2026-10), so that the core decodes the shipped configurations as strictly as it would with those: a
// key that does not exist, a value of another type, a policy without its type is an error. They handle no data.

type policy struct {
	Name             string              `mapstructure:"name"`
	Type             string              `mapstructure:"type"`
	BooleanAttribute booleanAttribute    `mapstructure:"boolean_attribute"`
	Latency          latency             `mapstructure:"latency"`
	Probabilistic    probabilistic       `mapstructure:"probabilistic"`
	NumericAttribute numericAttribute    `mapstructure:"numeric_attribute"`
	StatusCode       map[string][]string `mapstructure:"status_code"`
}

type booleanAttribute struct {
	Key         string `mapstructure:"key"`
	Value       bool   `mapstructure:"value"`
	InvertMatch bool   `mapstructure:"invert_match"`
}

type latency struct {
	ThresholdMs      int64 `mapstructure:"threshold_ms"`
	UpperThresholdMs int64 `mapstructure:"upper_threshold_ms"`
}

type probabilistic struct {
	HashSalt           string  `mapstructure:"hash_salt"`
	SamplingPercentage float64 `mapstructure:"sampling_percentage"`
}

type numericAttribute struct {
	Key         string `mapstructure:"key"`
	MinValue    int64  `mapstructure:"min_value"`
	MaxValue    int64  `mapstructure:"max_value"`
	InvertMatch bool   `mapstructure:"invert_match"`
}

type decisionCache struct {
	SampledCacheSize    int `mapstructure:"sampled_cache_size"`
	NonSampledCacheSize int `mapstructure:"non_sampled_cache_size"`
}

type tailSampling struct {
	DecisionWait            time.Duration `mapstructure:"decision_wait"`
	NumTraces               uint64        `mapstructure:"num_traces"`
	ExpectedNewTracesPerSec uint64        `mapstructure:"expected_new_traces_per_sec"`
	DecisionCache           decisionCache `mapstructure:"decision_cache"`
	Policies                []policy      `mapstructure:"policies"`
}

var policyTypes = map[string]bool{
	"always_sample": true, "latency": true, "numeric_attribute": true, "probabilistic": true, "status_code": true, "boolean_attribute": true,
}

func (c *tailSampling) Validate() error {
	if len(c.Policies) == 0 {
		return errors.New("tail_sampling needs policies")
	}
	if c.DecisionWait < time.Second { // 30 without a unit is 30 ns
		return fmt.Errorf("tail_sampling: decision_wait of %s", c.DecisionWait)
	}
	names := map[string]bool{}
	for _, each := range c.Policies {
		if each.Name == "" || names[each.Name] {
			return fmt.Errorf("tail_sampling: policy name %q is empty or used twice", each.Name)
		}
		names[each.Name] = true
		if !policyTypes[each.Type] {
			return fmt.Errorf("tail_sampling: unknown sampling policy type %s", each.Type)
		}
		if each.Type == "boolean_attribute" && each.BooleanAttribute.Key == "" {
			return errors.New("tail_sampling: boolean_attribute without a key")
		}
	}
	return nil
}

type enabled struct {
	Enabled bool `mapstructure:"enabled"`
}

type resourceConversion struct {
	Enabled                  bool `mapstructure:"enabled"`
	ExcludeServiceAttributes bool `mapstructure:"exclude_service_attributes"`
}

type remoteWriteQueue struct {
	Enabled      bool `mapstructure:"enabled"`
	QueueSize    int  `mapstructure:"queue_size"`
	NumConsumers int  `mapstructure:"num_consumers"`
}

type remoteWrite struct {
	exporterhelper.TimeoutConfig  `mapstructure:",squash"`
	configretry.BackOffConfig     `mapstructure:"retry_on_failure"`
	confighttp.ClientConfig       `mapstructure:",squash"`
	Namespace                     string             `mapstructure:"namespace"`
	ExternalLabels                map[string]string  `mapstructure:"external_labels"`
	ResourceToTelemetryConversion resourceConversion `mapstructure:"resource_to_telemetry_conversion"`
	Queue                         remoteWriteQueue   `mapstructure:"remote_write_queue"`
	TargetInfo                    enabled            `mapstructure:"target_info"`
	TranslationStrategy           string             `mapstructure:"translation_strategy"`
	SendMetadata                  bool               `mapstructure:"send_metadata"`
	MaxBatchSizeBytes             int                `mapstructure:"max_batch_size_bytes"`
}

func (c *remoteWrite) Validate() error {
	if c.Endpoint == "" {
		return errors.New("prometheusremotewrite needs an endpoint")
	}
	return nil
}

type clickhouse struct {
	exporterhelper.TimeoutConfig `mapstructure:",squash"`
	configretry.BackOffConfig    `mapstructure:"retry_on_failure"`
	SendingQueue                 configoptional.Optional[exporterhelper.QueueBatchConfig] `mapstructure:"sending_queue"`
	Endpoint                     string                                                   `mapstructure:"endpoint"`
	Database                     string                                                   `mapstructure:"database"`
	Username                     string                                                   `mapstructure:"username"`
	Password                     string                                                   `mapstructure:"password"`
	Compress                     string                                                   `mapstructure:"compress"`
	ConnectionParams             map[string]string                                        `mapstructure:"connection_params"`
	CreateSchema                 bool                                                     `mapstructure:"create_schema"`
	AsyncInsert                  bool                                                     `mapstructure:"async_insert"`
	TTL                          time.Duration                                            `mapstructure:"ttl"`
}

func (c *clickhouse) Validate() error {
	if c.Endpoint == "" {
		return errors.New("clickhouse needs an endpoint")
	}
	return nil
}

var errStandIn = errors.New("a stand-in that only checks configurations: it handles no data")

func tailSamplingFactory() processor.Factory {
	create := func(ctx context.Context, set processor.Settings, config component.Config, next consumer.Traces) (processor.Traces, error) {
		refuse := func(_ context.Context, traces ptrace.Traces) (ptrace.Traces, error) { return traces, errStandIn }
		return processorhelper.NewTraces(ctx, set, config, next, refuse)
	}
	fresh := func() component.Config { return &tailSampling{DecisionWait: 30 * time.Second, NumTraces: 50000} }
	return processor.NewFactory(component.MustNewType("tail_sampling"), fresh, processor.WithTraces(create, component.StabilityLevelBeta))
}

func metricsFactory(name string, fresh component.CreateDefaultConfigFunc) exporter.Factory {
	create := func(ctx context.Context, set exporter.Settings, config component.Config) (exporter.Metrics, error) {
		return exporterhelper.NewMetrics(ctx, set, config, func(context.Context, pmetric.Metrics) error { return errStandIn })
	}
	return exporter.NewFactory(component.MustNewType(name), fresh, exporter.WithMetrics(create, component.StabilityLevelBeta))
}

func remoteWriteFactory() exporter.Factory {
	return metricsFactory("prometheusremotewrite", func() component.Config {
		return &remoteWrite{
			ClientConfig: confighttp.NewDefaultClientConfig(), BackOffConfig: configretry.NewDefaultBackOffConfig(),
			TargetInfo: enabled{true}, Queue: remoteWriteQueue{true, 10000, 5},
		}
	})
}

func clickhouseFactory() exporter.Factory {
	return metricsFactory("clickhouse", func() component.Config {
		return &clickhouse{BackOffConfig: configretry.NewDefaultBackOffConfig(), CreateSchema: true, AsyncInsert: true}
	})
}
