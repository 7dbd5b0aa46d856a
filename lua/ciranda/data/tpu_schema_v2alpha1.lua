-- luacheck: no max line length
--- The Cloud TPU API, version v2alpha1, as data: every message with its fields, every method with its HTTP form.
--
-- Source: the client that Google Cloud SDK 578.0.0 carries for this version, which Google generates from the API's
-- discovery document; compared with the public discovery document of 2026-10-01, which has less. One entry
-- here is one entry there. A field's value is its type:
--
--   "string" "bool" "int32" "float"   as JSON has them
--   "int64"                           a string of digits in JSON (proto3), a number or a string on input
--   "timestamp" "duration"            RFC 3339 with Z; seconds with an s, as in "3600s". Both are strings in the
--                                     source, told apart by the field's name (...Time, ...Timestamp; ...Duration)
--   "any"                             a JSON object with fields of its own (google.protobuf.Any or Struct)
--   "Name"                            the message Name
--   { "A", "B" }                      an enum; the first value is the default, which is never sent
--   "T[]" "T{}"                       a list of T; a map from strings to T
--
-- Left out are the request messages of the source, whose fields are a method's `query` and `body` here, and the
-- generated wrappers of maps. `path` is without the version; a variable in braces stands for one segment.
--
-- To follow a newer API: apply the same rules to its discovery document (schemas -> messages, resources.*.methods ->
-- methods, `httpMethod` -> verb, `flatPath` -> path, query parameters -> query, `request.$ref` -> body). The spec
-- tests/spec/sim/schema_spec.lua checks that every name used here is defined.

-- stylua: ignore
return {
  version = "v2alpha1",
  messages = {
    AbstractTrafficShape = {
      allToAllTraffic = "AllToAllTraffic", nToMTraffic = "NToMTraffic", ringTraffic = "RingTraffic",
    },
    AcceleratorConfig = {
      topology = "string",
      type = { "TYPE_UNSPECIFIED", "V2", "V3", "V4", "V5LITE_POD", "V5P", "V6E", "TPU7X", "V6EA", "TPU7" },
    },
    AcceleratorType = { acceleratorConfigs = "AcceleratorConfig[]", name = "string", type = "string" },
    AcceptedData = {},
    AccessConfig = { externalIp = "string" },
    ActiveData = {},
    AllToAllTraffic = { group = "CoordinateList" },
    AttachedDisk = {
      sourceDisk = "string", workerIds = "string[]",
      mode = { "DISK_MODE_UNSPECIFIED", "READ_WRITE", "READ_ONLY" },
    },
    BestEffort = {},
    BootDiskConfig = {
      customerEncryptionKey = "CustomerEncryptionKey", diskSizeGb = "int64",
      enableConfidentialCompute = "bool", provisionedIops = "int64", provisionedThroughput = "int64",
      sourceImage = "string", storagePool = "string",
    },
    ChipCoordinate = {
      sliceCoordinate = "int32", xCoordinate = "int32", yCoordinate = "int32", zCoordinate = "int32",
    },
    ChipCoordinateList = { coordinates = "ChipCoordinate[]" },
    ChipCoordinateRangeGenerator = {
      sliceCoordinates = "Range", xCoordinates = "Range", yCoordinates = "Range", zCoordinates = "Range",
    },
    ConfidentialInstanceConfig = {
      confidentialInstanceType = { "CONFIDENTIAL_INSTANCE_TYPE_UNSPECIFIED", "SEV" },
    },
    CoordinateList = {
      chipCoordinate = "ChipCoordinateList", chipCoordinateRangeGenerator = "ChipCoordinateRangeGenerator",
    },
    CreatingData = {},
    CustomTrafficMatrix = { shapeGeneratedEntry = "ShapeGeneratedEntry[]" },
    CustomerEncryptionKey = { kmsKeyName = "string" },
    DefaultUniformTrafficMatrix = {},
    DeletingData = {},
    DstSliceTraffic = { sliceCoord = "int32", traffic = "Traffic" },
    Empty = {},
    FailedData = { error = "Status" },
    GenerateServiceIdentityRequest = {},
    GenerateServiceIdentityResponse = { identity = "ServiceIdentity" },
    GetGuestAttributesRequest = { queryPath = "string", workerIds = "string[]" },
    GetGuestAttributesResponse = { guestAttributes = "GuestAttributes[]" },
    GetMaintenanceInfoResponse = { nodeUpcomingMaintenances = "NodeUpcomingMaintenanceInfo[]" },
    Guaranteed = { minDuration = "duration", reserved = "bool" },
    GuestAttributes = { queryPath = "string", queryValue = "GuestAttributesValue" },
    GuestAttributesEntry = { key = "string", namespace = "string", value = "string" },
    GuestAttributesValue = { items = "GuestAttributesEntry[]" },
    Interval = { endTime = "timestamp", startTime = "timestamp" },
    ListAcceleratorTypesResponse = {
      acceleratorTypes = "AcceleratorType[]", nextPageToken = "string", unreachable = "string[]",
    },
    ListLocationsResponse = { locations = "Location[]", nextPageToken = "string" },
    ListNodesResponse = { nextPageToken = "string", nodes = "Node[]", unreachable = "string[]" },
    ListOperationsResponse = {
      nextPageToken = "string", operations = "Operation[]", unreachable = "string[]",
    },
    ListQueuedResourcesResponse = {
      nextPageToken = "string", queuedResources = "QueuedResource[]", unreachable = "string[]",
    },
    ListReservationsResponse = { nextPageToken = "string", reservations = "Reservation[]" },
    ListRuntimeVersionsResponse = {
      nextPageToken = "string", runtimeVersions = "RuntimeVersion[]", unreachable = "string[]",
    },
    Location = {
      displayName = "string", labels = "string{}", locationId = "string", metadata = "any",
      name = "string",
    },
    LogicalTrafficMatrix = {
      customTrafficMatrix = "CustomTrafficMatrix",
      defaultUniformTrafficMatrix = "DefaultUniformTrafficMatrix",
      sliceToSliceAdjacencyList = "SliceToSliceAdjacencyList",
    },
    MultiNodeParams = {
      nodeCount = "int32", nodeIdPrefix = "string",
      workloadType = { "WORKLOAD_TYPE_UNSPECIFIED", "THROUGHPUT_OPTIMIZED", "AVAILABILITY_OPTIMIZED" },
    },
    NToMTraffic = {
      dstGroup = "CoordinateList", srcGroup = "CoordinateList",
      trafficDirection = {
        "TRAFFIC_DIRECTION_UNSPECIFIED", "TRAFFIC_DIRECTION_UNIDIRECTIONAL",
        "TRAFFIC_DIRECTION_BIDIRECTIONAL",
      },
    },
    NetworkConfig = {
      canIpForward = "bool", enableExternalIps = "bool", network = "string", queueCount = "int32",
      subnetwork = "string",
    },
    NetworkEndpoint = { accessConfig = "AccessConfig", ipAddress = "string", port = "int32" },
    Node = {
      acceleratorConfig = "AcceleratorConfig", acceleratorType = "string", autocheckpointEnabled = "bool",
      bootDiskConfig = "BootDiskConfig", cidrBlock = "string",
      confidentialInstanceConfig = "ConfidentialInstanceConfig", createTime = "timestamp",
      dataDisks = "AttachedDisk[]", description = "string", healthDescription = "string", id = "int64",
      labels = "string{}", metadata = "string{}", multisliceNode = "bool", name = "string",
      networkConfig = "NetworkConfig", networkConfigs = "NetworkConfig[]",
      networkEndpoints = "NetworkEndpoint[]", queuedResource = "string", runtimeVersion = "string",
      schedulingConfig = "SchedulingConfig", serviceAccount = "ServiceAccount",
      shieldedInstanceConfig = "ShieldedInstanceConfig", symptoms = "Symptom[]", tags = "string[]",
      upcomingMaintenance = "UpcomingMaintenance",
      apiVersion = { "API_VERSION_UNSPECIFIED", "V1_ALPHA1", "V1", "V2_ALPHA1" },
      health = {
        "HEALTH_UNSPECIFIED", "HEALTHY", "TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE",
      },
      state = {
        "STATE_UNSPECIFIED", "CREATING", "READY", "RESTARTING", "REIMAGING", "DELETING", "REPAIRING",
        "STOPPED", "STOPPING", "STARTING", "PREEMPTED", "TERMINATED", "HIDING", "HIDDEN", "UNHIDING",
        "UNKNOWN",
      },
    },
    NodeSpec = { multiNodeParams = "MultiNodeParams", node = "Node", nodeId = "string", parent = "string" },
    NodeUpcomingMaintenanceInfo = {
      nodeName = "string", nodeUid = "int64", upcomingMaintenance = "UpcomingMaintenance",
    },
    Operation = { done = "bool", error = "Status", metadata = "any", name = "string", response = "any" },
    OperationMetadata = {
      apiVersion = "string", cancelRequested = "bool", createTime = "timestamp", endTime = "timestamp",
      statusDetail = "string", target = "string", verb = "string",
    },
    PeakTraffic = { peakTrafficGbps = "float" },
    PerformMaintenanceQueuedResourceRequest = { nodeNames = "string[]" },
    PerformMaintenanceRequest = {},
    ProvisioningData = {},
    QueuedResource = {
      bestEffort = "BestEffort", createTime = "timestamp", guaranteed = "Guaranteed", name = "string",
      queueingPolicy = "QueueingPolicy", reservationName = "string", runDuration = "RunDuration",
      spot = "Spot", state = "QueuedResourceState", tpu = "Tpu", trafficConfig = "TrafficConfig",
      provisioningModel = {
        "PROVISIONING_MODEL_UNSPECIFIED", "STANDARD", "SPOT", "RESERVATION_BOUND", "FLEX_START",
      },
    },
    QueuedResourceState = {
      acceptedData = "AcceptedData", activeData = "ActiveData", creatingData = "CreatingData",
      deletingData = "DeletingData", failedData = "FailedData", provisioningData = "ProvisioningData",
      suspendedData = "SuspendedData", suspendingData = "SuspendingData",
      state = {
        "STATE_UNSPECIFIED", "CREATING", "ACCEPTED", "PROVISIONING", "FAILED", "DELETING", "ACTIVE",
        "SUSPENDING", "SUSPENDED", "WAITING_FOR_RESOURCES",
      },
      stateInitiator = { "STATE_INITIATOR_UNSPECIFIED", "USER", "SERVICE" },
    },
    QueueingPolicy = {
      validAfterDuration = "duration", validAfterTime = "timestamp", validInterval = "Interval",
      validUntilDuration = "duration", validUntilTime = "timestamp",
    },
    Range = { ["end"] = "int32", start = "int32", step = "int32" },
    Reservation = {
      name = "string", standard = "Standard",
      state = {
        "STATE_UNSPECIFIED", "APPROVED", "PROVISIONING", "ACTIVE", "DEPROVISIONING", "EXPIRED", "FAILED",
      },
    },
    ResetQueuedResourceRequest = {},
    RingTraffic = {
      group = "CoordinateList",
      trafficDirection = {
        "TRAFFIC_DIRECTION_UNSPECIFIED", "TRAFFIC_DIRECTION_UNIDIRECTIONAL",
        "TRAFFIC_DIRECTION_BIDIRECTIONAL",
      },
    },
    RunDuration = { maxRunDuration = "duration", terminationTime = "timestamp" },
    RuntimeVersion = { name = "string", version = "string" },
    SchedulingConfig = {
      preemptible = "bool", reservationName = "string", reserved = "bool", spot = "bool",
      terminationTimestamp = "timestamp",
      provisioningModel = { "PROVISIONING_MODEL_UNSPECIFIED", "STANDARD", "SPOT", "RESERVATION_BOUND" },
    },
    ServiceAccount = { email = "string", scope = "string[]" },
    ServiceIdentity = { email = "string" },
    ShapeGeneratedEntry = {
      abstractTrafficShape = "AbstractTrafficShape", traffic = "Traffic",
      trafficShapeInstantiation = "CoordinateList",
    },
    ShieldedInstanceConfig = { enableSecureBoot = "bool" },
    SimulateMaintenanceEventRequest = { workerIds = "string[]" },
    SliceToSliceAdjacencyList = { srcTraffic = "SrcSliceTraffic[]" },
    Spot = {},
    SrcSliceTraffic = { dstTraffic = "DstSliceTraffic[]", sliceCoord = "int32" },
    Standard = {
      interval = "Interval", resourceType = "string", size = "int32", usage = "Usage",
      capacityUnits = { "CAPACITY_UNITS_UNSPECIFIED", "CORES", "CHIPS" },
    },
    StartNodeRequest = {},
    Status = { code = "int32", details = "any[]", message = "string" },
    StopNodeRequest = {},
    SuspendedData = {},
    SuspendingData = {},
    Symptom = {
      createTime = "timestamp", details = "string", workerId = "string",
      symptomType = {
        "SYMPTOM_TYPE_UNSPECIFIED", "LOW_MEMORY", "OUT_OF_MEMORY", "EXECUTE_TIMED_OUT", "MESH_BUILD_FAIL",
        "HBM_OUT_OF_MEMORY", "PROJECT_ABUSE",
      },
    },
    Tpu = { nodeSpec = "NodeSpec[]" },
    Traffic = { peakTraffic = "PeakTraffic" },
    TrafficConfig = { anticipatedTrafficMatrix = "LogicalTrafficMatrix" },
    UpcomingMaintenance = {
      canReschedule = "bool", latestWindowStartTime = "string", windowEndTime = "string",
      windowStartTime = "string",
      maintenanceStatus = { "UNKNOWN", "PENDING", "ONGOING" },
      type = { "UNKNOWN_TYPE", "SCHEDULED", "UNSCHEDULED" },
    },
    Usage = { total = "int64" },
  },
  methods = {
    ["acceleratorTypes.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/acceleratorTypes/{acceleratorType}",
      response = "AcceleratorType",
    },
    ["acceleratorTypes.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/acceleratorTypes",
      query = { filter = "string", orderBy = "string", pageSize = "int32", pageToken = "string" },
      response = "ListAcceleratorTypesResponse",
    },
    ["nodes.create"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes",
      query = { nodeId = "string", requestId = "string" },
      body = "Node",
      response = "Operation",
    },
    ["nodes.delete"] = {
      verb = "DELETE",
      path = "projects/{project}/locations/{location}/nodes/{node}",
      query = { requestId = "string" },
      response = "Operation",
    },
    ["nodes.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/nodes/{node}",
      response = "Node",
    },
    ["nodes.getGuestAttributes"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:getGuestAttributes",
      body = "GetGuestAttributesRequest",
      response = "GetGuestAttributesResponse",
    },
    ["nodes.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/nodes",
      query = { pageSize = "int32", pageToken = "string" },
      response = "ListNodesResponse",
    },
    ["nodes.patch"] = {
      verb = "PATCH",
      path = "projects/{project}/locations/{location}/nodes/{node}",
      query = { updateMask = "string" },
      body = "Node",
      response = "Operation",
    },
    ["nodes.performMaintenance"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:performMaintenance",
      body = "PerformMaintenanceRequest",
      response = "Operation",
    },
    ["nodes.simulateMaintenanceEvent"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:simulateMaintenanceEvent",
      body = "SimulateMaintenanceEventRequest",
      response = "Operation",
    },
    ["nodes.start"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:start",
      body = "StartNodeRequest",
      response = "Operation",
    },
    ["nodes.stop"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:stop",
      body = "StopNodeRequest",
      response = "Operation",
    },
    ["operations.cancel"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/operations/{operation}:cancel",
      response = "Empty",
    },
    ["operations.delete"] = {
      verb = "DELETE",
      path = "projects/{project}/locations/{location}/operations/{operation}",
      response = "Empty",
    },
    ["operations.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/operations/{operation}",
      response = "Operation",
    },
    ["operations.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/operations",
      query = { filter = "string", pageSize = "int32", pageToken = "string", returnPartialSuccess = "bool" },
      response = "ListOperationsResponse",
    },
    ["queuedResources.create"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/queuedResources",
      query = { queuedResourceId = "string", requestId = "string" },
      body = "QueuedResource",
      response = "Operation",
    },
    ["queuedResources.delete"] = {
      verb = "DELETE",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}",
      query = { force = "bool", requestId = "string" },
      response = "Operation",
    },
    ["queuedResources.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}",
      response = "QueuedResource",
    },
    ["queuedResources.getMaintenanceInfo"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}:getMaintenanceInfo",
      response = "GetMaintenanceInfoResponse",
    },
    ["queuedResources.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/queuedResources",
      query = { pageSize = "int32", pageToken = "string" },
      response = "ListQueuedResourcesResponse",
    },
    ["queuedResources.performMaintenanceQueuedResource"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}:performMaintenanceQueuedResource",
      body = "PerformMaintenanceQueuedResourceRequest",
      response = "Operation",
    },
    ["queuedResources.reset"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}:reset",
      body = "ResetQueuedResourceRequest",
      response = "Operation",
    },
    ["reservations.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/reservations",
      query = { pageSize = "int32", pageToken = "string" },
      response = "ListReservationsResponse",
    },
    ["runtimeVersions.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/runtimeVersions/{runtimeVersion}",
      response = "RuntimeVersion",
    },
    ["runtimeVersions.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/runtimeVersions",
      query = { filter = "string", orderBy = "string", pageSize = "int32", pageToken = "string" },
      response = "ListRuntimeVersionsResponse",
    },
    ["locations.generateServiceIdentity"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}:generateServiceIdentity",
      body = "GenerateServiceIdentityRequest",
      response = "GenerateServiceIdentityResponse",
    },
    ["locations.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}",
      response = "Location",
    },
    ["locations.list"] = {
      verb = "GET",
      path = "projects/{project}/locations",
      query = { extraLocationTypes = "string[]", filter = "string", pageSize = "int32", pageToken = "string" },
      response = "ListLocationsResponse",
    },
  },
}
